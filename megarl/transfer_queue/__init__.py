"""Between rollout and training: groups go in as they finish, and come out as whole steps in a fixed order."""

from megarl.transfer_queue.memory import TransferQueue

__all__ = ["TransferQueue"]
