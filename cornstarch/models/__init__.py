"""Models: composition, import, preprocessing and storage."""
