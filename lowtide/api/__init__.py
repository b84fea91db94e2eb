"""The public verbs and what they hand back. Nothing is imported here: `order` does without torch, which `optimize` needs."""
