"""The subcommands of `superfluid`, one module each, imported only when used."""
