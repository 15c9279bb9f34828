"""Between rollout and training: groups go in as they finish, and come out as whole steps."""

from megarl.transfer_queue.queue import TransferQueue

__all__ = ["TransferQueue"]
