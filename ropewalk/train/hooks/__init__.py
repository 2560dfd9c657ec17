"""Hooks observe a training run or react to it; `order.py` lists those of every run."""

from .hook import Hook as Hook
