"""What a layer costs: FLOPs, bytes and saved tensors."""
