"""What frozen encoders make of items, kept on the disk: files, keys, looking up while data is read, keeping."""
