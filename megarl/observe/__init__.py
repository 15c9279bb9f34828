"""What a run says of itself: metrics rows, phase times, a live display of them."""

from megarl.observe.metrics import EVALUATIONS_FILE, METRICS_FILE, MetricsLog, Phases, read_evaluations, read_metrics
from megarl.observe.progress import watch

__all__ = ["EVALUATIONS_FILE", "METRICS_FILE", "MetricsLog", "Phases", "read_evaluations", "read_metrics", "watch"]
