"""The book: a site from the same sources as the notebooks, which `make book` builds."""
