"""The command `fullrank`."""

from fullrank.cli.app import main as main
