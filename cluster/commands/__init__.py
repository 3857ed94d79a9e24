"""One module per subcommand of `headway`: add_parser(subparsers) and run(args) -> exit code."""
