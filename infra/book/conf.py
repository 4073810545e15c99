"""Sphinx's settings for the book."""

project = "Scale by Hand"
author = "Scale by Hand contributors"
copyright = "Scale by Hand contributors, MIT licence"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx-mathjax-offline"]
exclude_patterns = ["_build"]

nb_execution_mode = "off"  # the solved notebooks have their outputs
nb_code_prompt_show = "Show what is folded here"
nb_code_prompt_hide = "Fold it again"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"

html_theme = "sphinx_book_theme"
html_title = "Scale by Hand"
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "use_fullscreen_button": False}
