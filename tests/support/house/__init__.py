"""Measures the source tree: files, imports and terms (`figures.py`); which files a step passes through (`way.py`)."""
