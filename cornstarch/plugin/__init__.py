"""The Booster-style interface: what a plugin says becomes a plan; `cornstarch.booster` carries it out."""
