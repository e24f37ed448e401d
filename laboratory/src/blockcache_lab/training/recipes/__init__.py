"""One recipe for each family that can be trained; `blockcache_lab.training.config.RECIPES` lists them."""
