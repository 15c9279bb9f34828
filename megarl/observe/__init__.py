"""What a run says of itself: metrics rows, phase times, live displays."""

from megarl.observe.metrics import EVALUATIONS_FILE, METRICS_FILE, MetricsLog, Phases, read_evaluations, read_metrics
from megarl.observe.progress import watch
from megarl.observe.transfer import show_transfer

__all__ = [
    "EVALUATIONS_FILE",
    "METRICS_FILE",
    "MetricsLog",
    "Phases",
    "read_evaluations",
    "read_metrics",
    "show_transfer",
    "watch",
]
