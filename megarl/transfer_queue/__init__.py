"""Between rollout and training: groups go in as they finish, and come out as whole steps.

The journal keeps on disk what goes in and what comes out, so that a run that ended goes on from there.
"""

from megarl.transfer_queue.queue import TransferQueue
from megarl.transfer_queue.segment import JournalError

__all__ = ["JournalError", "TransferQueue"]
