"""The programs, as an installed package has them: python -m jagged_modules.examples."""
