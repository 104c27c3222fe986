"""`make demo`: a run that is killed twice ends bit-identical to one that was never stopped."""
