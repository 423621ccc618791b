"""Event logs: `logs` reads them, `datasets` downloads published ones."""
