"""Processors of single modalities, tokenization with placeholders, and the processors of whole Hugging Face models."""
