"""Plain numbers of a buffer, and the same as Prometheus scrapes them (docs/metrics.md)."""

from __future__ import annotations

from moe_triton.core.metrics import CONTENT_TYPE, WAIT_BOUNDS_S, Metrics, metrics_of, prometheus

__all__ = ["CONTENT_TYPE", "WAIT_BOUNDS_S", "Metrics", "metrics_of", "prometheus"]
