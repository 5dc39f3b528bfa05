"""What tests share: fakes, servers, tiny models, fleets.  No test is here."""
