"""A ledger: names with balances, and what moved between them."""

from ledger.money import share_out, show_cents


class Ledger:
    """Balances in cents; every move keeps their sum."""

    def __init__(self):
        self.balances = {}
        self.moves = []

    def move(self, giver, taker, cents):
        """Move cents between two accounts, which begin at 0. Raise ValueError for an amount below 1."""
        if cents < 1:
            raise ValueError("an amount is at least one cent")
        self.balances[giver] = self.balances.get(giver, 0) - cents
        self.balances[taker] = self.balances.get(taker, 0) + cents
        self.moves.append((giver, taker, cents))

    def split_bill(self, payer, eaters, cents):
        """The payer has paid for all eaters: each of the others owes the payer a share, as share_out deals them.

        Shares go to the eaters in the order of the list; the payer's own share moves nothing, nor does a share of 0.
        """
        for eater, share in zip(eaters, share_out(cents, len(eaters)), strict=True):
            if eater != payer and share:
                self.move(eater, payer, share)

    def settle(self):
        """Return the fewest-first moves [debtor, creditor, cents] that bring every balance to 0; nothing is moved.

        Again and again the largest debt pays the largest credit what both have; equal ones go by name.
        """
        left = {name: cents for name, cents in self.balances.items() if cents}
        found = []
        while left:
            debtor = min(left, key=lambda name: (left[name], name))
            creditor = min(left, key=lambda name: (-left[name], name))
            cents = min(-left[debtor], left[creditor])
            found.append([debtor, creditor, cents])
            for name, change in ((debtor, cents), (creditor, -cents)):
                left[name] += change
                if not left[name]:
                    del left[name]
        return found

    def statement(self):
        """Return one line per account, by name: the name, a colon, a space and its balance."""
        return [f"{name}: {show_cents(cents)}" for name, cents in sorted(self.balances.items())]
