from fullrank.cli import main

main()
