"""Import of whole Hugging Face multimodal models: `decompose` splits a model into parts, `undivided` keeps it whole."""
