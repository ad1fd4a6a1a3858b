"""The one way to train: shared by Trainer, Booster, PipelineEngine and custom loops."""
