"""Taking a whole Hugging Face multimodal model apart: `dismantle` in the module of that name."""
