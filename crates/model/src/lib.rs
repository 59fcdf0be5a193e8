//! Layers, and models built from a Hugging Face config.json.
