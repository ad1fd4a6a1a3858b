"""What a run measures and reports: metrics, trackers, progress, profiles, timelines."""
