"""Between rollout and training: groups go in as they finish, and come out as whole steps.

The journal keeps on disk what goes in and what comes out, so that a run that ended goes on from there. The coordinator
has the queue and its server; every rank has a client, and fetches what it reads of a step.
"""

from megarl.transfer_queue.client import Delivery, QueueClient, QueueError
from megarl.transfer_queue.counters import Counters
from megarl.transfer_queue.queue import TransferQueue
from megarl.transfer_queue.segment import JournalError
from megarl.transfer_queue.service import Keys, QueueServer

__all__ = [
    "Counters",
    "Delivery",
    "JournalError",
    "Keys",
    "QueueClient",
    "QueueError",
    "QueueServer",
    "TransferQueue",
]
