<!-- Six unions of five or four traits: 10,000 profiles from 28 encodings. -->
<schema name="reader">
  <system>You recommend books to the readers of a public library.</system>
  <user>
    This is what we know of the reader.
    Age:
    <union>
      <module name="child">The reader is a child of about ten, who reads alone and likes short chapters.</module>
      <module name="teenager">The reader is a teenager, who wants to be taken seriously and not to be taught.</module>
      <module name="student">The reader is a student in the first years of university, away from home.</module>
      <module name="parent">The reader is a parent of small children and tired most of the time.</module>
      <module name="retired">The reader is retired after a long working life and has seen much of the world.</module>
    </union>
    Knowledge of the subject:
    <union>
      <module name="no-knowledge">The subject is new to the reader, who needs every term explained.</module>
      <module name="some-knowledge">The reader remembers the basics of the subject from school.</module>
      <module name="amateur">The reader has followed the subject for years as a hobby.</module>
      <module name="expert">The reader works in the field and is bored by introductions.</module>
    </union>
    Time to read:
    <union>
      <module name="commute">There are twenty minutes on a train, twice a day.</module>
      <module name="evenings">There is half an hour in the evening, before sleep.</module>
      <module name="weekends">There is no time in the week but long mornings at weekends.</module>
      <module name="all-day">There is time all day, and nobody who interrupts.</module>
    </union>
    Way to learn:
    <union>
      <module name="pictures">Pictures, maps and diagrams say more to this reader than words.</module>
      <module name="listening">The reader prefers to listen and borrows audio books.</module>
      <module name="doing">The reader wants to try things out: experiments, recipes, puzzles.</module>
      <module name="reading">The reader likes long texts without any pictures.</module>
      <module name="talking">The reader talks about every book in a reading group.</module>
    </union>
    Favourite shelf:
    <union>
      <module name="adventure">The last five loans were adventure stories at sea.</module>
      <module name="crime">The last five loans were crime novels set in small towns.</module>
      <module name="history">The last five loans were books on the history of engineering.</module>
      <module name="nature">The last five loans were about birds, rivers and trees.</module>
      <module name="poetry">The last five loans were thin volumes of poetry.</module>
    </union>
    Patience:
    <union>
      <module name="impatient">A book that does not begin at once is given back after ten pages.</module>
      <module name="steady">Books are finished in the end, even those that disappoint.</module>
      <module name="thorough">Footnotes are read too, and mistakes are reported to the publisher.</module>
      <module name="rereading">Favourite books are read again every year.</module>
      <module name="browsing">Several books are open at any time, few are finished.</module>
    </union>
  </user>
  <assistant>Thank you. I keep this reader in mind.</assistant>
</schema>
