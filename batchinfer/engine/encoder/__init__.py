"""Encoders and classification heads: texts in padded tiles through transformers' own modules, no KV cache."""
