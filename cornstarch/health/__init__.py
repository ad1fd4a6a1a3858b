"""Health of a run: does every rank go on, does it do the same as the others, and does it hold the same weights?"""
