"""Between rollout and training: groups go in as they finish, and come out as whole steps in a fixed order.

The coordinator has the queue and its server; every rank has a client, and fetches what it reads of a step.
"""

from megarl.transfer_queue.client import Delivery, QueueClient, QueueError
from megarl.transfer_queue.memory import TransferQueue
from megarl.transfer_queue.service import Keys, QueueServer

__all__ = ["Delivery", "Keys", "QueueClient", "QueueError", "QueueServer", "TransferQueue"]
