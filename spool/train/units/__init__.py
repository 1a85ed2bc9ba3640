"""Multimodal units: who encodes which, features to micro-batches and gradients back; `index` and `plan` are pure."""
