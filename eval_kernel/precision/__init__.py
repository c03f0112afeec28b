"""Precision: which number format each weight is stored in, how it gets there, and what that costs.

``formats``, ``policy``, ``plan`` and ``allocate`` are pure: the coordinator reads them. The rest needs torch.
"""
