"""The models that recipes use, built from their job settings; every module can re-initialise itself."""

__all__ = ["attention", "build", "defaults", "hugging_face"]
