"""Commands of this distribution, one file each."""
