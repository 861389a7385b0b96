"""Parts of memopt that its features share: lazy names, logging, child processes, tables, versions of torch, doctor."""
