"""A finished or running training run as one HTML page that needs no network, and its loss as a picture. No torch."""

from cornstarch.report.write import write_report

__all__ = ["write_report"]
