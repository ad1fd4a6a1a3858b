"""Import of whole Hugging Face multimodal models: `decompose` splits a model into parts, or keeps it undivided."""
