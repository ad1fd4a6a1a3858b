"""What the processor is made of: placeholders in texts, counts of features, processors of single modalities."""
