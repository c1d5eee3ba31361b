"""What documents are computed behind: short texts of several kinds, which tell of no other document.

A document that was computed alone has its first tokens see nothing, which they never do in a prompt. Behind some other
documents, whatever these say, its rows are much nearer to those that it has in a prompt (benchmarks/neutral_prefix.py).
The text is a part of what blobs are: change it, and documents are encoded anew.
"""

ALL = 1 << 20
"""Of the neutral text as many tokens as it has."""
NEUTRAL_TEXT = """\
The harbour of Ostrand
Ostrand is a small town on the north coast, known for its wooden warehouses and its long stone pier. It was \
founded in 1387 by fishermen from the outer islands and received the rights of a market in 1412. The pier was \
built between 1861 and 1868 and is 740 metres long. Today about 9,300 people live there, most of whom work in \
shipping, fish processing and tourism. Every August the town holds a race of old sailing boats, which draws some \
20,000 visitors.

Marta Lindqvist
Marta Lindqvist (born 4 March 1921, died 17 October 1998) was an engineer and writer. She studied mechanics in \
the capital, worked for the state railways until 1957 and designed three bridges, of which the one at Halden is \
the best known. Her first book, "Iron and Weather", appeared in 1962 and was translated into eleven languages. \
In 1974 she was awarded the Prize of the Academy. She was married to the painter Tomas Berg; they had two \
daughters.

How the heat pump works
A heat pump moves heat from a cold place to a warm one. A liquid that boils at a low temperature passes through \
the evaporator, where it takes up heat and turns into gas. The compressor raises the pressure of the gas and \
with it the temperature. In the condenser the gas gives its heat to the water of the house and becomes liquid \
again. For every unit of electricity, such a machine delivers three to five units of heat; the colder it is \
outside, the less.

Returns and refunds
You may return any item within 30 days of delivery. Items must be unused and in their original box. To begin, \
open your orders, choose the item and select "Return". We send you a label by e-mail; print it and bring the \
parcel to any post office. Refunds are made to the card that was used, usually within five working days. Gift \
cards, downloads and opened cosmetics cannot be returned. If an item arrived damaged, please write to us first \
and add a photograph.

The meeting of 12 May
Present: Ms Adeyemi (chair), Mr Novak, Ms Ito, Mr Silva. 1. The minutes of the last meeting were accepted. 2. Mr \
Novak reported that sales had risen by 8 per cent since January, while costs had remained the same. 3. The new \
office will open in September; Ms Ito is responsible for the move. 4. It was decided, with three votes to one, \
to put off the purchase of new vehicles until next year. The next meeting is on 9 June at ten o'clock.

The fox and the well
One evening a fox fell into a well and could not get out. A goat came by, looked down and asked whether the \
water was good. "It is the best in the country," said the fox, "come and taste it." The goat, who was thirsty, \
jumped in without thinking. Then the fox climbed on her back, sprang out and ran away. "Next time," he called, \
"look first how you will come out, before you go in."

"""
