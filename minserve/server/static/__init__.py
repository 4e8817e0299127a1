"""The built-in pages: plain HTML, CSS and JavaScript modules, served as they are."""
