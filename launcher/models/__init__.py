"""The models that recipes use, built from their job settings; every module can re-initialize itself."""

__all__ = ["build", "defaults", "hugging_face", "language_model"]
