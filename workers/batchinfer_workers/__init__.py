"""Workers: the only place where the ledger, the data set and the engine meet."""
