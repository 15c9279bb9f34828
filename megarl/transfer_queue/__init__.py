"""Between rollout and training: groups go in as they finish, and come out as whole steps in a fixed order.

The journal keeps on disk what goes in and what comes out, so that a run that ended goes on from there.
"""

from megarl.transfer_queue.journal import Journal, Recovered, SyncPolicy, recover
from megarl.transfer_queue.memory import TransferQueue
from megarl.transfer_queue.records import Accepted, Admitted, Chunk, Dropped, Record, Took, Trained
from megarl.transfer_queue.segment import JournalError

__all__ = [
    "Accepted",
    "Admitted",
    "Chunk",
    "Dropped",
    "Journal",
    "JournalError",
    "Record",
    "Recovered",
    "SyncPolicy",
    "Took",
    "Trained",
    "TransferQueue",
    "recover",
]
