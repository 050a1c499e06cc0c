"""`hf-ssr`: what is typed, asked, said and shown. Not for the Hub."""
