"""Results of functions and items of datasets kept on disk: memopt.data.cached."""
