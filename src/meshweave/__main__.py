"""`python -m meshweave` runs the command `meshweave`."""

from meshweave.cli import main

if __name__ == "__main__":
    main()
