"""A finished or running training run as one HTML page that needs no network, and its loss as a picture. No torch."""

from cornstarch.report.run_report import write_report

__all__ = ["write_report"]
