"""`python -m memopt demo`: two real models trained on real data, first as an ordinary script does it, then inside half
of the memory that took. tasks.py, models.py and library_text.py are what is trained; ordinary.py and within_budget.py
are the two scripts; the rest runs, measures and shows them."""
