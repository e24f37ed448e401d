"""Files of other projects, read without their code: pickles of which nothing is run, torch archives, OmegaConf's values."""
