"""What a run says of itself: metrics rows and phase times."""

from megarl.observe.metrics import EVALUATIONS_FILE, METRICS_FILE, MetricsLog, Phases, read_metrics

__all__ = ["EVALUATIONS_FILE", "METRICS_FILE", "MetricsLog", "Phases", "read_metrics"]
