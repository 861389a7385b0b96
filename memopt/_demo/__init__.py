"""`python -m memopt demo`: two real models trained on real data, first as an ordinary script does it, then inside half
of the memory that took. tasks.py is what is trained, training_variants.py how; the rest runs, measures and shows it."""
